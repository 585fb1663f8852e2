# Sourced by setup.sh: what builds the documentation as a site.

MDBOOK=0.5.4
MDBOOK_MERMAID=0.17.1

setup_docs() {
    local bin="$CACHE/tools/bin"
    export CARGO_TARGET_DIR="$CACHE/target-tools"
    [ "$("$bin/mdbook" --version 2>/dev/null)" = "mdbook v$MDBOOK" ] ||
        quietly mdbook.log "building mdbook" retried cargo install --locked --root "$CACHE/tools" "mdbook@$MDBOOK"
    [ "$("$bin/mdbook-mermaid" --version 2>/dev/null)" = "mdbook-mermaid $MDBOOK_MERMAID" ] ||
        quietly mdbook-mermaid.log "building mdbook-mermaid" retried cargo install --locked --root "$CACHE/tools" "mdbook-mermaid@$MDBOOK_MERMAID"
}
