//! Kinds of manifests: what a registry must keep byte by byte, whatever it thinks of it.

use futures::FutureExt as _;
use futures::future::BoxFuture;
use kybernate_spec::{Descriptor, media_type};
use serde_json::json;

use crate::oci::check::{Checks, MAY, MUST, Need, SHOULD, Stop, skip};
use crate::oci::content::Doc;
use crate::oci::reply::Reply;
use crate::oci::repo::Repo;

/// Pushes what a manifest needs and makes the manifest.
type Make = fn(Repo) -> BoxFuture<'static, Result<Doc, Stop>>;

/// A kind of manifest, and whether a registry has to take it.
struct Kind {
    id: &'static str,
    accepted: Need,
    make: Make,
}

const KINDS: &[Kind] = &[
    Kind { id: "oci-image", accepted: MUST, make: |repo| image(repo, json!({})).boxed() },
    Kind { id: "oci-index", accepted: MUST, make: |repo| index(repo).boxed() },
    Kind {
        id: "docker-image",
        accepted: SHOULD,
        make: |repo| async { Ok(image(repo, json!({})).await?.docker()) }.boxed(),
    },
    Kind { id: "docker-list", accepted: SHOULD, make: |repo| docker_list(repo).boxed() },
    Kind {
        id: "no-layers",
        accepted: MUST,
        make: |repo| image(repo, json!({ "layers": [] })).boxed(),
    },
    Kind {
        id: "annotated",
        accepted: MUST,
        make: |repo| {
            image(repo, json!({ "annotations": { "org.example.ä": "ö\n\"\\", "empty": "" } }))
                .boxed()
        },
    },
    Kind { id: "artifact", accepted: MUST, make: |repo| artifact(repo).boxed() },
    Kind {
        id: "artifact-by-config",
        accepted: MUST,
        make: |repo| artifact_by_config(repo).boxed(),
    },
    Kind { id: "same-layer-twice", accepted: MUST, make: |repo| twice(repo).boxed() },
    Kind { id: "layer-unknown-type", accepted: MUST, make: |repo| unknown_layer(repo).boxed() },
    Kind { id: "layer-elsewhere", accepted: SHOULD, make: |repo| foreign_layer(repo).boxed() },
    Kind { id: "config-inline", accepted: MUST, make: |repo| inline(repo).boxed() },
    Kind {
        id: "unknown-fields",
        accepted: MUST,
        make: |repo| image(repo, json!({ "futureField": { "a": [1, 2.50, null, true] } })).boxed(),
    },
    Kind {
        id: "index-empty",
        accepted: MUST,
        make: |_| async { Ok(Doc::index(&[], json!({}))) }.boxed(),
    },
    Kind { id: "index-of-index", accepted: MUST, make: |repo| nested(repo).boxed() },
    Kind { id: "index-artifact", accepted: MUST, make: |repo| index_artifact(repo).boxed() },
    Kind { id: "index-of-platforms", accepted: MUST, make: |repo| platforms(repo).boxed() },
    Kind { id: "whitespace", accepted: MUST, make: |repo| whitespace(repo).boxed() },
    Kind { id: "field-order", accepted: MUST, make: |repo| field_order(repo).boxed() },
    Kind { id: "escapes", accepted: MUST, make: |repo| escapes(repo).boxed() },
    Kind {
        id: "unknown-type",
        accepted: MAY,
        make: |_| {
            async {
                Ok(Doc::raw(
                    "application/vnd.example.unknown.v1+json",
                    r#"{ "any" : [ "thing" ] }"#,
                ))
            }
            .boxed()
        },
    },
    Kind {
        id: "unknown-type-no-json",
        accepted: MAY,
        make: |_| {
            async { Ok(Doc::raw("application/vnd.example.unknown.v1", &b"\x00\x01binary\xff"[..])) }
                .boxed()
        },
    },
];

pub(super) fn add(checks: &mut Checks) {
    for Kind { id, accepted, make } in KINDS {
        let title = format!("a manifest ({id}) is taken: 201");
        let id = format!("push.manifest.kind.{id}");
        checks.add(*accepted, format!("{id}.accepted"), title, move |repo: Repo| async move {
            let doc = make(repo.clone()).await?;
            repo.put("latest", &doc).send().await?.is(201).map(drop)
        });
        let act = move |repo: Repo| async move {
            let doc = make(repo.clone()).await?;
            let reply = repo.put("latest", &doc).send().await?;
            if (400..500).contains(&reply.status) {
                return skip(format!("the registry refuses it with {}", reply.status));
            }
            reply.is(201)?;
            let pulled = repo.get("manifests/latest").send().await?;
            let head = repo.head(&format!("manifests/{}", doc.digest())).send().await?;
            Ok((doc, pulled, head))
        };
        let mut group = checks.on(id, act);
        let exact = "it comes back byte by byte";
        group.look(MUST, "exact", exact, |(doc, pulled, _): &(Doc, Reply, Reply)| {
            pulled.is(200)?.body_is(&doc.content).map(drop)
        });
        group.look(SHOULD, "type", "it comes back as what it was pushed", |(doc, pulled, _)| {
            pulled.is(200)?.header_is("content-type", &doc.media_type).map(drop)
        });
        group.look(MUST, "by-digest", "HEAD by digest finds it", |(doc, _, head)| {
            head.is(200)?.digest_header_fits(&doc.content).map(drop)
        });
    }
}

async fn image(repo: Repo, more: serde_json::Value) -> Result<Doc, Stop> {
    Ok(repo.image_with("image", more).await?.doc)
}

async fn pushed(repo: &Repo, doc: Doc) -> Result<Descriptor, Stop> {
    repo.put(&doc.digest().to_string(), &doc).send().await?.is(201)?;
    Ok(doc.descriptor())
}

async fn index(repo: Repo) -> Result<Doc, Stop> {
    let one = repo.image_with("one", json!({})).await?.doc;
    let two = repo.image_with("two", json!({})).await?.doc;
    let children = [pushed(&repo, one).await?, pushed(&repo, two).await?];
    Ok(Doc::index(&children, json!({})))
}

async fn docker_list(repo: Repo) -> Result<Doc, Stop> {
    let child = image(repo.clone(), json!({})).await?.docker();
    let child = pushed(&repo, child).await?;
    Ok(Doc::index(&[child], json!({})).docker())
}

async fn artifact(repo: Repo) -> Result<Doc, Stop> {
    let config = repo.push_as(media_type::OCI_EMPTY, &"{}".into()).await?;
    let layer = repo.push_as("text/plain", &repo.bytes("text", 30)).await?;
    let more = json!({ "artifactType": "application/vnd.example.thing.v1" });
    Ok(Doc::image(&config, &[layer], more))
}

async fn artifact_by_config(repo: Repo) -> Result<Doc, Stop> {
    let kind = "application/vnd.example.config.v1+json";
    let config = repo.push_as(kind, &repo.bytes("config", 30)).await?;
    let layer = repo.push_as("application/vnd.example.layer.v1", &repo.bytes("any", 30)).await?;
    Ok(Doc::image(&config, &[layer], json!({})))
}

async fn twice(repo: Repo) -> Result<Doc, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    Ok(Doc::image(&image.config, &[image.layer.clone(), image.layer], json!({})))
}

async fn unknown_layer(repo: Repo) -> Result<Doc, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let layer = repo.push_as("application/vnd.example+any;v=1", &repo.bytes("any", 30)).await?;
    Ok(Doc::image(&image.config, &[layer], json!({})))
}

/// A layer that may not be distributed, so that the registry does not have it.
async fn foreign_layer(repo: Repo) -> Result<Doc, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let kind = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip";
    let foreign = Descriptor::of(kind, b"somewhere else");
    let value = json!({ "urls": ["https://example.com/layer"], "mediaType": kind,
        "digest": foreign.digest, "size": 14 });
    let more = json!({ "layers": [image.layer, value] });
    Ok(Doc::image(&image.config, &[], more))
}

async fn inline(repo: Repo) -> Result<Doc, Stop> {
    let config = repo.push_as(media_type::OCI_EMPTY, &"{}".into()).await?;
    let value = json!({ "mediaType": media_type::OCI_EMPTY, "digest": config.digest, "size": 2,
        "data": "e30=" });
    let layer = repo.push_as("text/plain", &repo.bytes("text", 30)).await?;
    let more = json!({ "config": value, "artifactType": "application/vnd.example.thing.v1" });
    Ok(Doc::image(&config, &[layer], more))
}

async fn nested(repo: Repo) -> Result<Doc, Stop> {
    let inner = index(repo.clone()).await?;
    let inner = pushed(&repo, inner).await?;
    Ok(Doc::index(&[inner], json!({})))
}

async fn index_artifact(repo: Repo) -> Result<Doc, Stop> {
    let child = image(repo.clone(), json!({})).await?;
    let child = pushed(&repo, child).await?;
    let more = json!({ "artifactType": "application/vnd.example.list.v1",
        "annotations": { "org.example.key": "value" } });
    Ok(Doc::index(&[child], more))
}

async fn platforms(repo: Repo) -> Result<Doc, Stop> {
    let child = image(repo.clone(), json!({})).await?;
    let child = pushed(&repo, child).await?;
    let entry = |architecture: &str, variant: &str| {
        json!({ "mediaType": child.media_type, "digest": child.digest, "size": child.size,
            "platform": { "os": "linux", "architecture": architecture, "variant": variant } })
    };
    let more = json!({ "manifests": [entry("amd64", "v2"), entry("arm", "v7")] });
    Ok(Doc::index(&[], more))
}

async fn whitespace(repo: Repo) -> Result<Doc, Stop> {
    let doc = image(repo, json!({})).await?;
    let text = String::from_utf8_lossy(&doc.content).replace(',', " ,\r\n\t ");
    Ok(Doc::raw(&doc.media_type, format!("\n {text}\n\n")))
}

/// Fields in another order than any library writes them, which parsing and writing would change.
async fn field_order(repo: Repo) -> Result<Doc, Stop> {
    let image = repo.image_with("image", json!({})).await?;
    let (config, layer) = (json!(image.config), json!([image.layer]));
    let kind = &image.doc.media_type;
    let text = format!(
        r#"{{"layers":{layer},"schemaVersion":2,"zzz":0,"config":{config},"mediaType":"{kind}","aaa":1e0}}"#
    );
    Ok(Doc::raw(kind, text))
}

async fn escapes(repo: Repo) -> Result<Doc, Stop> {
    let doc = image(repo, json!({ "annotations": { "key": "PLACE" } })).await?;
    let text = String::from_utf8_lossy(&doc.content).replace("PLACE", r"\u0041\/\u00e4<&>");
    Ok(Doc::raw(&doc.media_type, text))
}
