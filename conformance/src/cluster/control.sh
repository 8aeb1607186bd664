# Starts a cluster's control plane and waits until it answers. Runs in the namespaces of a node, so
# that it ends with it, but in the network of the hub.
# Arguments: directory, address, port, then SUBNET=NODE for each node's pods.
set -eu

kube=$1 address=$2 port=$3
shift 3
data=/var/lib/kybernate/control
mkdir -p "$data"

start() {
    program=$1
    shift
    "$kube/bin/$program" "$@" >"$data/$program.log" 2>&1 </dev/null &
}

# Says what it wrote last, without the Go traces behind it.
fail() {
    echo "failed: $1 does not answer: $(grep -v '^goroutine\|^[[:space:]]' "$data/$1.log" | tail -n 4)"
    exit 1
}

for route in "$@"; do
    ip route replace "${route%=*}" via "${route#*=}"
done

start etcd --data-dir "$data/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380
start kube-apiserver --etcd-servers http://127.0.0.1:2379 \
    --bind-address "$address" --advertise-address "$address" --secure-port "$port" \
    --tls-cert-file "$kube/apiserver.crt" --tls-private-key-file "$kube/apiserver.key" \
    --token-auth-file "$kube/tokens.csv" --authorization-mode Node,RBAC \
    --service-account-issuer https://kubernetes.default.svc \
    --service-account-key-file "$kube/accounts.pub" \
    --service-account-signing-key-file "$kube/accounts.key" \
    --service-cluster-ip-range 10.79.0.0/24 --kubelet-preferred-address-types InternalIP \
    --kubelet-client-certificate "$kube/kubelet-client.crt" \
    --kubelet-client-key "$kube/kubelet-client.key"
server=$!
tries=0
# Anybody may ask that, as soon as the roles are there.
until curl -sf -m 2 --cacert "$kube/ca.crt" "https://$address:$port/readyz" >/dev/null; do
    kill -0 "$server" 2>/dev/null || fail kube-apiserver
    tries=$((tries + 1))
    # Two minutes: it takes 3 s, and ten times that on a machine that compiles.
    [ "$tries" -lt 1200 ] || fail kube-apiserver
    sleep 0.1
done

# The default rate of its calls makes its start five seconds longer.
start kube-controller-manager --kubeconfig "$kube/controller-manager.conf" \
    --use-service-account-credentials --service-account-private-key-file "$kube/accounts.key" \
    --root-ca-file "$kube/ca.crt" --leader-elect=false --bind-address 127.0.0.1 \
    --kube-api-qps 500 --kube-api-burst 1000
start kube-scheduler --kubeconfig "$kube/scheduler.conf" --leader-elect=false \
    --bind-address 127.0.0.1
