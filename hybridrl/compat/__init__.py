"""Code and commands written for other libraries; verl has a package of its own, `hybridrl.verl_compat`."""
