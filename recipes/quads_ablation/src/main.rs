//! Runs the arms of the QUADS comparison. The parts are in the library beside.
fn main() {}
