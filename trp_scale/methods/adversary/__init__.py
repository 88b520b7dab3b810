"""The adversary: perturbations that ascend on the loss while the weights descend (AdPE). settings.py has what a recipe
says of each kind; positions.py and pixels.py are the hooks."""
