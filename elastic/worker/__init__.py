"""Inside the training process: what ``elastic.run`` is made of."""
