"""A data set of images -> depth and segmentation maps for it, predicted by models, in shards beside the images'."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("pseudo-label")
