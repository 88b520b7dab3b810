"""What an encoder has learned, in figures and pictures."""
