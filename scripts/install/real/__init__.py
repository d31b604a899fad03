"""A small pretrained model, and a world that it can do something in."""
