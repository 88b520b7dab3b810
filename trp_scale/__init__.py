"""Pre-training of encoders under minimax task weights, adversarial positions and learned masks."""

__version__ = "0.2.0"
