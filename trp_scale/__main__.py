"""`python -m trp_scale`: the command `trp-scale`."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console()
