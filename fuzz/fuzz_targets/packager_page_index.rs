#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kybernate_packager::fuzz::page_index(bytes));
