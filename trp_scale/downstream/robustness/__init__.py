"""How a classifier of ImageNet fares on other kinds of images: adversarially chosen, drawn, sketched, corrupted."""
