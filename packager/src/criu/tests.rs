use super::*;
use proptest::prelude::*;
use prost::Message as _;

fn image(magic: Magic, messages: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = COMMON_MAGIC.to_le_bytes().to_vec();
    bytes.extend(magic.0.to_le_bytes());
    for message in messages {
        bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
        bytes.extend(message);
    }
    bytes
}

#[test]
fn records_are_read_in_order() {
    let processes = [1, 7].map(|pid| Process { pid, ppid: 0, threads: vec![pid] });
    let bytes = image(Magic::PSTREE, &processes.clone().map(|process| process.encode_to_vec()));
    let mut reader = ImageReader::new(&*bytes, Magic::PSTREE).unwrap();
    for process in processes {
        assert_eq!(reader.next_message::<Process>().unwrap(), Some(process));
    }
    assert_eq!(reader.next_message::<Process>().unwrap(), None);
}

#[test]
fn an_image_of_another_type_is_refused() {
    let bytes = image(Magic::MM, &[]);
    assert!(matches!(ImageReader::new(&*bytes, Magic::PSTREE), Err(ImageError::Magic(_))));
}

#[test]
fn a_record_that_ends_early_is_refused() {
    let whole = image(Magic::PSTREE, &[Process { pid: 1, ..Process::default() }.encode_to_vec()]);
    for length in 9..whole.len() {
        let mut reader = ImageReader::new(&whole[..length], Magic::PSTREE).unwrap();
        assert!(reader.next_message::<Process>().is_err(), "{length}");
    }
}

const DEVICE: &str = "device-1f-00112233445566778899aabbccddeeff.img";

#[test]
fn a_file_of_device_memory_is_called_by_its_process_and_its_gpu() {
    let gpu = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    assert_eq!(device_file(0x1f, gpu).as_deref(), Some(DEVICE));
    assert_eq!(device_of(DEVICE), Some((0x1f, gpu.to_owned())));
    for other in ["", "GPU-", "MIG-00112233-4455-6677-8899-aabbccddeeff", "GPU-0/../11223344"] {
        assert_eq!(device_file(1, other), None, "{other}");
    }
    assert_eq!(device_file(1, &gpu.to_uppercase()), None);
}

#[test]
fn names_of_a_real_dump_are_known() {
    for name in [
        "cgroup.img",
        "core-1.img",
        "descriptors.json",
        "fdinfo-2.img",
        "files.img",
        "fs-1.img",
        "ghost-file-1f.img",
        "ids-1.img",
        "inventory.img",
        "ipcns-var-11.img",
        "mm-1.img",
        "mountpoints-13.img",
        "netns-10.img",
        "pagemap-1.img",
        "pagemap-shmem-4026.img",
        "pstree.img",
        "seccomp.img",
        "tmpfs-dev-58.tar.gz.img",
        "tmpfs-9.tar.gz.img",
        "utsns-12.img",
        "amdgpu-pages-1-000a.img",
        "timens-0.img",
        "pidns-12.img",
    ] {
        assert_eq!(classify(name), NameClass::Image, "{name}");
    }
    assert_eq!(classify("pages-12.img"), NameClass::Pages);
    assert_eq!(classify(DEVICE), NameClass::Device);
    assert_eq!(classify("dump.log"), NameClass::Leftover);
}

#[test]
fn other_names_are_foreign() {
    for name in [
        "",
        ".",
        "..",
        "parent",
        "criu.conf",
        "core-.img",
        "core-x!.img",
        "core-1.img.img",
        "../core-1.img",
        "pages-1.img/x",
        "action.sh",
        "amdgpu-../x.img",
        "device-1.img",
        "device-01-00112233445566778899aabbccddeeff.img",
        "device-1F-00112233445566778899aabbccddeeff.img",
        "device-+1-00112233445566778899aabbccddeeff.img",
        "device-100000000-00112233445566778899aabbccddeeff.img",
        "device-1-00112233445566778899aabbccddeef.img",
        "device-1-00112233445566778899AABBCCDDEEFF.img",
        "device-1-00112233445566778899aabbccddeeff-1.img",
        "core-1",
    ] {
        assert_eq!(classify(name), NameClass::Foreign, "{name}");
    }
}

proptest! {
    #[test]
    fn no_known_name_leaves_its_directory(name in ".{0,40}") {
        if classify(&name) != NameClass::Foreign {
            prop_assert!(!name.contains('/') && !name.contains('\0') && !name.starts_with('.'));
        }
    }

    #[test]
    fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let image = image(Magic::MM, &[bytes]);
        let mut reader = ImageReader::new(&*image, Magic::MM).unwrap();
        while let Ok(Some(_)) = reader.next_message::<Memory>() {}
    }
}
