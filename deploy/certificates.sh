#!/bin/sh
# Makes what regions need to trust each other, with openssl: a private authority, a certificate and an admin token a region.
#
#   deploy/certificates.sh DIR us-east:quorate.us-east.example eu-west:quorate.eu-west.example ...
#
# Each argument is REGION:HOST[,HOST...], the names by which other regions reach it (those in `cluster.regions`). It writes
#
#   DIR/authority/ca.key            keep this one offline: whoever has it can join the cluster
#   DIR/REGION/{ca.crt,region.crt,region.key,admin-token}    for that region's daemon, and for nobody else
#
# What is there already stays, so a region can be added later with the same command. Certificates last 397 days: to renew one,
# remove its region.crt, run this again, and send the daemon a SIGHUP. With cert-manager or another authority of your own
# you need none of this; the certificates then have to serve for both server and client authentication.
set -eu
umask 077

main() {
    if [ "$#" -lt 2 ]; then
        echo "usage: $0 DIR REGION:HOST[,HOST...]..." >&2
        exit 2
    fi
    dir=$1
    shift
    authority "$dir/authority"
    for region in "$@"; do
        case $region in
            ?*:?*) certificate "$dir/authority" "$dir/${region%%:*}" "${region%%:*}" "${region#*:}" ;;
            *) echo "$0: \`$region\`: want REGION:HOST" >&2; exit 2 ;;
        esac
    done
}

authority() {
    mkdir -p "$1"
    [ -f "$1/ca.key" ] || new_key "$1/ca.key"
    [ -f "$1/ca.crt" ] || openssl req -x509 -new -key "$1/ca.key" -sha256 -days 3650 -subj "/CN=quorate authority" \
        -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$1/ca.crt"
}

certificate() {
    mkdir -p "$2"
    cp "$1/ca.crt" "$2/ca.crt"
    [ -f "$2/admin-token" ] || openssl rand -hex 32 > "$2/admin-token"
    [ -f "$2/region.key" ] || new_key "$2/region.key"
    [ -f "$2/region.crt" ] || sign "$@"
    echo "$2: $(openssl x509 -in "$2/region.crt" -noout -enddate)"
}

sign() {
    names=$(echo "$4" | sed 's/,/,DNS:/g')
    printf '%s\n' "basicConstraints=critical,CA:FALSE" "keyUsage=critical,digitalSignature" \
        "extendedKeyUsage=serverAuth,clientAuth" "subjectAltName=DNS:$names" > "$2/extensions"
    openssl req -new -key "$2/region.key" -subj "/CN=$3" -out "$2/request"
    openssl x509 -req -in "$2/request" -CA "$1/ca.crt" -CAkey "$1/ca.key" -CAcreateserial -sha256 -days 397 \
        -extfile "$2/extensions" -out "$2/region.crt"
    rm "$2/request" "$2/extensions"
}

new_key() {
    openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null \
        || openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"
}

main "$@"
