"""Shard images from folders, tars, torchvision or Hugging Face datasets, or synthetic scenes (--embedded)."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("shard-images")
