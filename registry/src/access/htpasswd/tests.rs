use super::*;

const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

const KEY: [u8; 32] = [7; 32];

fn file(lines: &[(&str, &str, u32)]) -> Vec<u8> {
    let line = |(user, password, cost): &(&str, &str, u32)| {
        format!("{user}:{}\n", bcrypt::hash(password, *cost).unwrap())
    };
    lines.iter().map(line).collect::<String>().into_bytes()
}

fn users(content: &[u8]) -> Arc<Users> {
    Arc::new(Users::read(Path::new("h"), content, &KEY).unwrap())
}

#[tokio::test]
async fn only_the_right_password_of_a_user_is_accepted() {
    let users = users(&file(&[("alice", "right", 4), ("bob", "other", 5)]));
    let checker = Checker::default();
    for _again in 0..2 {
        let alice = checker.check(&users, ("alice", "right"), HERE).await.unwrap();
        assert_eq!(alice.holder, Holder::User("alice".into()));
    }
    for (user, password) in
        [("alice", "other"), ("alice", ""), ("carol", "right"), ("", ""), ("alice", "right ")]
    {
        let refused = checker.check(&users, (user, password), HERE).await;
        assert_eq!(refused.unwrap_err(), PasswordError::Wrong, "{user} {password}");
    }
}

#[tokio::test]
async fn what_was_proven_once_is_not_hashed_again() {
    let users = users(&file(&[("alice", "right", 10)]));
    let checker = Checker::default();
    let first = checker.check(&users, ("alice", "right"), HERE).await.unwrap();
    let again = checker.check(&users, ("alice", "right"), HERE).await.unwrap();
    // Whoever hashes makes another one.
    assert!(Arc::ptr_eq(&first, &again));
}

#[test]
fn a_user_who_is_not_there_costs_as_much() {
    let users = users(&file(&[("alice", "right", 4), ("bob", "other", 5)]));
    let mut costs = std::collections::BTreeSet::new();
    for number in 0..100 {
        let hash = users.hash(&format!("nobody-{number}"));
        // A hash that is none is refused at once.
        assert!(matches!(bcrypt::verify("wrong", hash), Ok(false)), "{hash}");
        costs.insert(hash.parse::<HashParts>().unwrap().get_cost());
    }
    assert_eq!(costs, [4, 5].into(), "as those who are there");
}

#[test]
fn everything_wrong_is_said_at_once_and_no_hash() {
    let hash = bcrypt::hash("x", 4).unwrap();
    let content = format!(
        "# users\n\nalice:{hash}\nalice:{hash}\n:{hash}\nnobody\nmd5:$apr1$abc$def\ncostly:$2y$17{}\n",
        &hash[6..]
    );
    let wrong = Users::read(Path::new("h"), content.as_bytes(), &KEY).unwrap_err();
    let told: Vec<_> = wrong.iter().map(ToString::to_string).collect();
    let told = told.join("\n");
    insta::assert_snapshot!(told, @r"
    h:4:1: the user has a line already; remove one
    h:5:1: the line is not NAME:HASH; write it with `htpasswd -nB NAME`
    h:6:1: the line is not NAME:HASH; write it with `htpasswd -nB NAME`
    h:7:1: the hash is not bcrypt's; write the line with `htpasswd -nB NAME`
    h:8:1: the hash costs too much; use a cost of at most 16
    ");
    assert!(!told.contains(&hash[7..]));
}

#[test]
fn an_empty_file_has_no_users() {
    assert!(!users(b"").fits("a", "b"));
}

#[tokio::test]
async fn too_many_at_once_are_sent_away() {
    let users = users(&file(&[("alice", "right", 4)]));
    let checker = Checker::default();
    let _all = Arc::clone(&checker.waiting).try_acquire_many_owned(128).unwrap();
    let refused = checker.check(&users, ("alice", "right"), HERE).await;
    assert_eq!(refused.unwrap_err(), PasswordError::Busy);
}

#[tokio::test]
async fn who_guesses_is_sent_away_before_it_is_told_anything() {
    let users = users(&file(&[("alice", "right", 4), ("bob", "right", 4)]));
    let checker = Checker::default();
    let try_it = async |user: &str, password: &str, address: [u8; 4]| {
        checker.check(&users, (user, password), address.into()).await.map(drop)
    };
    let (guesser, other) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    // Right ones do not count, and who is remembered is not asked.
    for _ in 0..100 {
        assert_eq!(try_it("bob", "right", guesser).await, Ok(()));
    }
    for guess in 0..60 {
        assert_eq!(try_it("alice", &guess.to_string(), guesser).await, Err(PasswordError::Wrong));
    }
    // Time goes on meanwhile, at one more guess per second.
    let mut more = 0;
    while try_it("alice", "wrong", guesser).await == Err(PasswordError::Wrong) {
        more += 1;
    }
    assert!(more < 30, "{more}");
    assert_eq!(try_it("alice", "right", guesser).await, Err(PasswordError::Busy));
    assert_eq!(try_it("bob", "right", guesser).await, Ok(()));
    assert_eq!(try_it("alice", "right", other).await, Ok(()));
    assert_eq!(try_it("alice", "right", guesser).await, Ok(()), "it is remembered now");
}

#[tokio::test]
async fn one_address_takes_few_of_the_places() {
    let users = users(&file(&[("alice", "right", 4)]));
    let checker = Checker::default();
    let here = Client::of(HERE);
    let places =
        (0..WAITING_FROM_ONE_MAX).map(|_| checker.guesses.enter(here.clone(), Instant::now()));
    let _places: Vec<_> = places.map(Result::unwrap).collect();
    let refused = checker.check(&users, ("alice", "right"), HERE).await;
    assert_eq!(refused.unwrap_err(), PasswordError::Busy);
    checker.check(&users, ("alice", "right"), [10, 0, 0, 1].into()).await.unwrap();
}

proptest::proptest! {
    /// Whatever a file of users holds, it is read or refused with a line that it has.
    #[test]
    fn any_file_is_read_or_refused(content in "[a-z$0-9:#./ \r\n\u{0}]{0,120}") {
        if let Err(wrong) = Users::read(Path::new("h"), content.as_bytes(), &KEY) {
            proptest::prop_assert!(!wrong.is_empty());
            let lines = content.matches('\n').count() + 1;
            for mistake in wrong {
                let line = mistake.place.at.map_or(1, |(line, _)| line);
                proptest::prop_assert!((1..=lines).contains(&line), "{} {:?}", mistake, content);
            }
        }
    }
}
