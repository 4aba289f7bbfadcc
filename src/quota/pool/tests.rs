//! Tests of the pool and of a region's side of it, in made-up worlds with their own time.

mod counted;
mod loans;
mod members;
mod net;
mod permits;
mod replay;
mod resets;
mod restore;
mod rules;
mod steady;
mod support;
mod usable;
mod windows;
mod witness;
mod world;
