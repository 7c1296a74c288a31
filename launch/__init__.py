"""Starting a training script with the plugin already in place."""
