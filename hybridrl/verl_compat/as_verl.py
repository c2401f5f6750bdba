"""Importing this module makes `import verl` find hybridrl's modules, here and in all processes started from here."""

from hybridrl.verl_compat.alias import activate

activate()
