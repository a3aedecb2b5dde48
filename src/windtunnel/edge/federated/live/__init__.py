"""FedP2P live: groups that pass a model on and average over TCP, and Flower around them."""
