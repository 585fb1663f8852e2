//! Pages of a KV cache: gathered into sections, scattered back, and brought from one order into another.
