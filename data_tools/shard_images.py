"""Image folders, tars, torchvision and Hugging Face datasets, or --embedded (synthetic) -> a data set of shards."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("shard-images")
