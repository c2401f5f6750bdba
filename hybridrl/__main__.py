"""`python -m hybridrl COMMAND ...`, the same as the command `hybridrl`."""

from hybridrl.programs import main

if __name__ == "__main__":
    main()
