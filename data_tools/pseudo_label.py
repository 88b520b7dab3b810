"""Add depth and segmentation maps predicted by models to a data set of images."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("pseudo-label")
