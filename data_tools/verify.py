"""Check every index, size, checksum and array of a data set; report the first bad byte range with exit status 1."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("verify")
