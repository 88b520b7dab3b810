"""Check every index, size, checksum and array of a data set; the first bad byte range is named, exit status 1."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("verify")
