"""What the other scripts need of a machine: versions, environments, images, pretrained models."""
