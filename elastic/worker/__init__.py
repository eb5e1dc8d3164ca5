"""Code that runs inside the training process, behind ``elastic.run``."""
