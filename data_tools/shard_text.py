"""Text files, JSON lines, a Hugging Face dataset or --embedded -> a data set of shards for pre-training."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("shard-text")
