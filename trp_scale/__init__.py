"""trp_scale: pre-training of encoders that are good at their worst downstream task."""
