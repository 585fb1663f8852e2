"""How fast each tier reads and writes, against what lies below it in the same run."""
