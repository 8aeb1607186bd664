# make demo   a running container moves from one node to another
# make test   every check: formatting, lints, documentation, licences, all tests
# make soak   kills the registry a hundred times under load and looks at what is left
# make fuzz   looks for inputs that break a parser (fuzz/README.md)
# make bench  figures beside containerd's own path and beside other registries (release build)
# make install  programs, units, kyb's manual and completions, below PREFIX (/usr/local), and example
#               configurations where there are none, below SYSCONFDIR (/etc); all below DESTDIR

CARGO ?= cargo
export KYBERNATE_CACHE ?= /var/cache/kybernate

# The tests wait more than they compute: with one for each of two processors, both are idle half the time.
TEST_THREADS ?= 3

.PHONY: demo test build go lint bench soak fuzz clean setup install install-files

demo: build
	target/debug/kybernate-conformance demo

# Everything is built as the tests build it, so that each dependency is compiled once. What is built
# with Go is for the tests alone: the demo does not wait for it.
test: go lint
	$(CARGO) build --workspace --all-targets --locked
	RUST_TEST_THREADS=$(TEST_THREADS) $(CARGO) test --workspace --locked

build: setup
	$(CARGO) build --workspace --bins --locked

go:
	@sh conformance/checkpointctl.sh
	@sh conformance/kubernetes.sh

lint: setup
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --document-private-items --locked
	$(KYBERNATE_CACHE)/tools/bin/cargo-deny --locked check bans licenses sources

soak: setup
	KYBERNATE_SOAK_ROUNDS=100 $(CARGO) test -p kybernate-registry --locked --test it -- soak:: --nocapture

SECONDS ?= 60
TARGETS ?= $(notdir $(basename $(wildcard fuzz/fuzz_targets/*.rs)))

fuzz:
	for target in $(TARGETS); do \
		mkdir -p fuzz/target/found/$$target && \
		$(CARGO) fuzz run --fuzz-dir fuzz --sanitizer none $$target \
			fuzz/target/found/$$target fuzz/corpus/$$target -- -max_total_time=$(SECONDS) || exit 1; \
	done

bench: setup
	$(CARGO) build --workspace --bins --locked --release
	sh conformance/bench/peers.sh
	target/release/kybernate-conformance bench oci
	target/release/kybernate-conformance bench registry
	target/release/kybernate-conformance bench pack
	target/release/kybernate-conformance bench node
	target/release/kybernate-conformance bench node --on a
	target/release/kybernate-conformance bench runc
	target/release/kybernate-conformance bench

PREFIX ?= /usr/local
# Where the programs were built, and which of them are installed.
FROM ?= target/release
PROGRAMS ?= kyb kybernate-registry kybernate-agent kybernate-runc
# Where /etc is. A configuration that is there stays as it is.
SYSCONFDIR ?= /etc
SHARE = $(DESTDIR)$(PREFIX)/share
UNITS = $(DESTDIR)$(PREFIX)/lib/systemd/system
CONFIG = $(DESTDIR)$(SYSCONFDIR)/kybernate

install: setup
	$(CARGO) build --workspace --bins --locked --release
	$(MAKE) install-files

# Without building: packagers have built before.
install-files:
	install -d $(DESTDIR)$(PREFIX)/bin $(SHARE)/bash-completion/completions \
		$(SHARE)/zsh/site-functions $(SHARE)/fish/vendor_completions.d
	for program in $(PROGRAMS); do \
		install -m 0755 $(FROM)/$$program $(DESTDIR)$(PREFIX)/bin/ || exit 1; \
	done
	for service in agent registry; do \
		case " $(PROGRAMS) " in *" kybernate-$$service "*) \
			install -d $(UNITS) $(CONFIG) && \
			{ test -e $(CONFIG)/$$service.toml || \
				install -m 0644 deploy/$$service/example.toml $(CONFIG)/$$service.toml; } && \
			sed 's|/usr/bin/kybernate|$(PREFIX)/bin/kybernate|' \
				deploy/$$service/kybernate-$$service.service \
				>$(UNITS)/kybernate-$$service.service || exit 1 ;; \
		esac; \
	done
	$(FROM)/kyb man $(SHARE)/man/man1
	$(FROM)/kyb completion bash >$(SHARE)/bash-completion/completions/kyb
	$(FROM)/kyb completion zsh >$(SHARE)/zsh/site-functions/_kyb
	$(FROM)/kyb completion fish >$(SHARE)/fish/vendor_completions.d/kyb.fish

clean:
	-target/debug/kybernate-conformance node down all
	$(CARGO) clean

# Installs what is missing (Debian, as root) or says what to install. Looks only, when all is there.
setup:
	@sh conformance/setup.sh
