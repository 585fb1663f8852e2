//! Packing sections for the lower tiers, and back.
