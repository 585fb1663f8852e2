//! What must hold for every codec, and for those that quantise by groups.

mod cachegen;
mod grouped;
mod hostile;
mod lossless;
mod sections;
