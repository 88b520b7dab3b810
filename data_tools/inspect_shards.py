"""Show rows of a shard: text with part-of-speech groups in colour, or images with classes and maps."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("inspect")
