//! What needs the program itself: it runs, as the agent would run it, against a simulated GPU.

mod gpu;
mod gpu_storage;
mod simulation;
