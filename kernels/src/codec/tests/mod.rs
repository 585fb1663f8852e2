//! What must hold for every codec, and for those that quantise by groups.

mod grouped;
mod hostile;
mod lossless;
mod sections;
