//! Pods in words.

use serde_json::{Value, json};

/// A pod of the workload, restored or not.
#[derive(Clone, Debug)]
pub(super) struct Wanted<'a> {
    pub(super) name: &'a str,
    pub(super) namespace: &'a str,
    pub(super) node: &'a str,
    pub(super) image: &'a str,
    pub(super) annotations: Vec<(&'a str, &'a str)>,
    pub(super) memory: &'a str,
    pub(super) cpu: &'a str,
    /// Probes, or null.
    pub(super) readiness: Value,
    pub(super) liveness: Value,
}

impl<'a> Wanted<'a> {
    /// A pod on node b.
    pub(super) const fn new(name: &'a str, image: &'a str) -> Self {
        Self {
            name,
            namespace: "default",
            node: "b",
            image,
            annotations: Vec::new(),
            memory: "256Mi",
            cpu: "500m",
            readiness: Value::Null,
            liveness: Value::Null,
        }
    }

    /// A pod on node b that goes on where a checkpoint was taken, and is asked how it is.
    pub(super) fn restored(name: &'a str, pinned: &'a str) -> Self {
        Self {
            annotations: vec![("restore.kybernate.io/main", pinned)],
            readiness: json!({
                "exec": { "command": ["/workload", "status", "--state", "/state"] },
                "periodSeconds": 1,
                "timeoutSeconds": 5,
            }),
            ..Self::new(name, pinned)
        }
    }

    /// It is restarted when it is said to be sick.
    pub(super) fn watched(mut self) -> Self {
        self.liveness = json!({
            "exec": { "command": ["sh", "-c", "! test -e /sick"] },
            "periodSeconds": 1,
            "timeoutSeconds": 20,
            "failureThreshold": 1,
        });
        self
    }

    pub(super) fn with(mut self, annotation: &'a str, value: &'a str) -> Self {
        self.annotations.push((annotation, value));
        self
    }

    pub(super) fn pod(&self) -> Value {
        let annotations: serde_json::Map<String, Value> =
            self.annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name, "namespace": self.namespace, "annotations": annotations,
            },
            "spec": {
                "runtimeClassName": "kybernate",
                "nodeSelector": { "kubernetes.io/hostname": self.node },
                "terminationGracePeriodSeconds": 1,
                "dnsPolicy": "Default",
                "containers": [{
                    "name": "main",
                    "image": self.image,
                    "args": ["--mib", "24", "--say", "ticks"],
                    // Many of them share two processors.
                    "resources": {
                        "limits": { "memory": self.memory, "cpu": self.cpu },
                        "requests": { "cpu": "10m" },
                    },
                    "readinessProbe": self.readiness,
                    "livenessProbe": self.liveness,
                    "volumeMounts": [
                        { "name": "secret", "mountPath": "/secret" },
                        { "name": "scratch", "mountPath": "/scratch" },
                    ],
                }],
                "volumes": [
                    { "name": "secret", "secret": { "secretName": "words" } },
                    { "name": "scratch", "emptyDir": {} },
                ],
            },
        })
    }
}

/// The secret that such a pod has.
pub(super) fn secret(namespace: &str, word: &str) -> Value {
    let metadata = json!({ "name": "words", "namespace": namespace });
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": { "word": word },
    })
}
