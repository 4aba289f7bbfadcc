# Everything that a change must pass; changes nothing.
verify:
    ./tests/run

# Mends what tools can mend.
fix:
    cargo fmt --all
    cargo clippy --workspace --all-targets --fix --allow-dirty --allow-staged -- -D warnings

# How much of a limit three regions use, 80 ms apart (about six minutes).
utilisation:
    cargo bench --bench utilisation
