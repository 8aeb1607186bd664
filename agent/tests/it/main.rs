//! What needs the program itself: it runs, as the agent would run it, against a simulated GPU, and
//! against a real one where there is one.

mod gpu;
mod gpu_storage;
mod real;
mod simulation;
