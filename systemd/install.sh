#!/bin/sh
# Installs the unit, its slice, its group and, where there is none yet, the configuration. Run as root, again at will.
set -eu
here=$(dirname "$0")
install -D -m 644 "$here/elasticd.service" /etc/systemd/system/elasticd.service
install -D -m 644 "$here/elasticd.slice" /etc/systemd/system/elasticd.slice
install -D -m 644 "$here/elasticd.sysusers" /etc/sysusers.d/elasticd.conf
install -D -m 644 "$here/elasticd.tmpfiles" /etc/tmpfiles.d/elasticd.conf
systemd-sysusers /etc/sysusers.d/elasticd.conf
systemd-tmpfiles --create /etc/tmpfiles.d/elasticd.conf
if [ ! -e /etc/elasticd/elasticd.toml ]; then
    install -m 644 "$here/elasticd.toml" /etc/elasticd/elasticd.toml
fi
systemctl daemon-reload
