//! Signatures, ours and cosign's.

use bytes::Bytes;
use kybernate_packager::key::{KeyType, PublicKey, SigningKey};
use kybernate_packager::sign::sign;
use kybernate_packager::verify::{VerifyError, list_signatures, verify_signature};
use kybernate_spec::{Annotations, Manifest, media_type};

use crate::artifact::{checkpoint, noise, put, put_document};
use crate::cosign::Tools;
use crate::registry::Registry;

#[tokio::test]
async fn one_good_signature_by_a_given_key_is_enough() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        let kinds = [KeyType::P256, KeyType::Ed25519, KeyType::Ed25519];
        let keys = kinds.map(|kind| SigningKey::generate_of(kind).unwrap());
        let public: Vec<PublicKey> = keys.iter().map(|key| key.public().clone()).collect();
        let error = verify_signature(&store, &index.digest, &public).await.unwrap_err();
        assert!(matches!(error, VerifyError::NotSigned { .. }), "{error:?}");

        sign(&store, &index, &keys[0]).await.unwrap();
        let error = verify_signature(&store, &index.digest, &public[1..]).await.unwrap_err();
        assert!(matches!(error, VerifyError::OtherKeys { .. }), "{error:?}");
        assert!(error.to_string().contains(&public[0].hint()), "{error}");
        assert!(error.is_refusal());

        let signature = sign(&store, &index, &keys[1]).await.unwrap();
        let verified = verify_signature(&store, &index.digest, &public[1..]).await.unwrap();
        assert_eq!((verified.key, verified.signature), (public[1].hint(), signature.digest));
        assert_eq!(list_signatures(&store, &index.digest).await.unwrap().len(), 2);
    }
}

#[tokio::test]
async fn a_malformed_signature_is_passed_over_and_named() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        let broken = Manifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: Some(media_type::SIGSTORE_BUNDLE.to_owned()),
            config: put(&store, media_type::OCI_EMPTY, Bytes::from_static(b"{}")).await,
            layers: vec![put(&store, media_type::SIGSTORE_BUNDLE, noise(100, 2)).await],
            subject: Some(index.bare()),
            annotations: Annotations::new(),
        };
        let broken = put_document(&store, media_type::OCI_MANIFEST, &broken).await;
        let key = SigningKey::generate().unwrap();
        let keys = [key.public().clone()];
        let error = verify_signature(&store, &index.digest, &keys).await.unwrap_err();
        assert!(matches!(error, VerifyError::NotSigned { .. }), "{error:?}");
        assert!(error.to_string().contains(&broken.digest.to_string()), "{error}");
        sign(&store, &index, &key).await.unwrap();
        verify_signature(&store, &index.digest, &keys).await.unwrap();
    }
}

#[tokio::test]
async fn a_signature_of_something_else_does_not_count() {
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let good = checkpoint(&store, &[noise(1000, 1)]).await;
        let evil = checkpoint(&store, &[noise(1000, 2)]).await;
        let key = SigningKey::generate().unwrap();
        let signature = sign(&store, &good, &key).await.unwrap();
        // The same bundle, hung under another checkpoint.
        let stored = store.manifest(&signature.digest).await.unwrap();
        let mut moved: Manifest = serde_json::from_slice(&stored.content).unwrap();
        moved.subject = Some(evil.bare());
        put_document(&store, media_type::OCI_MANIFEST, &moved).await;
        let keys = [key.public().clone()];
        let error = verify_signature(&store, &evil.digest, &keys).await.unwrap_err();
        assert!(matches!(error, VerifyError::NotSigned { .. }), "{error:?}");
        assert!(error.to_string().contains("about something else"), "{error}");
    }
}

#[tokio::test]
async fn cosign_verifies_what_we_signed() {
    let Some(tools) = Tools::find() else { return };
    for registry in Registry::all() {
        for (name, kind) in [("a/p256", KeyType::P256), ("a/ed25519", KeyType::Ed25519)] {
            cosign_verifies(&tools, &registry, name, kind).await;
        }
    }
}

async fn cosign_verifies(tools: &Tools, registry: &Registry, name: &str, kind: KeyType) {
    let store = registry.open(name).await;
    let index = checkpoint(&store, &[noise(1000, 1)]).await;
    let key = SigningKey::generate_of(kind).unwrap();
    let signature = sign(&store, &index, &key).await.unwrap();
    let public = tools.home().join("ours.pub");
    fs_err::write(&public, key.public().to_pem()).unwrap();
    let reference = format!("{}/{name}@{}", registry.address(), index.digest);
    let verify = ["verify", "--insecure-ignore-tlog", "--key"];
    let arguments = [&verify[..], &[public.to_str().unwrap(), &reference]].concat();
    let told = tools.succeed("cosign", &arguments);
    assert!(told.contains(&index.digest.to_string()), "{told}");

    let other = tools.home().join("other.pub");
    fs_err::write(&other, SigningKey::generate_of(kind).unwrap().public().to_pem()).unwrap();
    let arguments = [&verify[..], &[other.to_str().unwrap(), &reference]].concat();
    assert!(!tools.run("cosign", &arguments).status.success());

    let discovered = tools.succeed("oras", &["discover", "--plain-http", &reference]);
    assert!(discovered.contains(&signature.digest.to_string()), "{discovered}");
}

#[tokio::test]
async fn we_verify_what_cosign_signed() {
    let Some(tools) = Tools::find() else { return };
    tools.succeed("cosign", &["generate-key-pair"]);
    let public = PublicKey::from_file(&tools.home().join("cosign.pub")).unwrap();
    for registry in Registry::all() {
        let store = registry.open("a/b").await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        let reference = format!("{}/a/b@{}", registry.address(), index.digest);
        tools.succeed(
            "cosign",
            &[
                "sign",
                "--key=cosign.key",
                "--tlog-upload=false",
                "--use-signing-config=false",
                "--yes",
                &reference,
            ],
        );
        let verified =
            verify_signature(&store, &index.digest, std::slice::from_ref(&public)).await.unwrap();
        assert_eq!(verified.key, public.hint());
        let other = [SigningKey::generate().unwrap().public().clone()];
        let error = verify_signature(&store, &index.digest, &other).await.unwrap_err();
        assert!(matches!(error, VerifyError::OtherKeys { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn keys_are_the_same_files_for_cosign_and_us() {
    let (Some(tools), Some(registry)) = (Tools::find(), Registry::docker()) else { return };
    // Theirs, read by us.
    tools.succeed("cosign", &["generate-key-pair"]);
    let path = tools.home().join("cosign.key");
    let theirs = SigningKey::from_file(&path, || Ok(Some("secret".to_owned()))).unwrap();
    let public = PublicKey::from_file(&tools.home().join("cosign.pub")).unwrap();
    assert_eq!(theirs.public().fingerprint(), public.fingerprint());
    // Ours, read by them.
    let ours = SigningKey::generate().unwrap();
    ours.write_files(&tools.home().join("ours"), b"secret").unwrap();
    assert_eq!(tools.succeed("cosign", &["public-key", "--key=ours.key"]), ours.public().to_pem());
    let store = registry.open("a/b").await;
    let index = checkpoint(&store, &[noise(1000, 1)]).await;
    let reference = format!("{}/a/b@{}", registry.address(), index.digest);
    let sign = ["sign", "--key=ours.key", "--tlog-upload=false", "--use-signing-config=false"];
    tools.succeed("cosign", &[&sign[..], &["--yes", &reference]].concat());
    verify_signature(&store, &index.digest, &[ours.public().clone()]).await.unwrap();
}
