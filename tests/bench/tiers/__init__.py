"""How fast each tier reads and writes, compared with the layer below it in the same run."""
