use super::*;

#[test]
fn an_id_lives_for_a_week() {
    let began = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let id = UploadId::random(began).unwrap();

    assert!(!id.is_expired(began));
    assert!(!id.is_expired(began + UPLOAD_LIFE));
    assert!(id.is_expired(began + UPLOAD_LIFE + Duration::from_secs(1)));
    assert_eq!(UPLOAD_LIFE, Duration::from_hours(168));
    assert_eq!(id.secret().parse::<UploadId>().unwrap(), id);
}

#[test]
fn two_ids_differ() {
    let now = SystemTime::now();
    assert_ne!(UploadId::random(now).unwrap(), UploadId::random(now).unwrap());
}

#[test]
fn what_is_printed_does_not_hold_the_secret() {
    let id = UploadId::random(SystemTime::now()).unwrap();
    assert_eq!(format!("{id:?}"), "UploadId(secret)");
}

#[test]
fn text_that_could_leave_the_directory_is_no_id() {
    for text in
        ["", "..", "../../../../../../../../../../etc/passwd", &"A".repeat(40), &"é".repeat(20)]
    {
        text.parse::<UploadId>().unwrap_err();
    }
}
