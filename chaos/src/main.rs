//! `quorate-chaos`: see the library.

fn main() {}
