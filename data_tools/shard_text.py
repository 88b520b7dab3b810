"""Shard text files, JSON lines, parquet, a Hugging Face dataset or the embedded corpus for pre-training."""

from trp_scale.cli.main import console

if __name__ == "__main__":
    console("shard-text")
