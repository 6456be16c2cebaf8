# shellcheck shell=bash
# Packages of other Debian suites than the machine's own, for scripts that say "source". What they fetch comes from the
# machine's own mirrors, through a state of apt's that lies in a folder of the cache: the machine's is neither used nor
# changed.

# debian_apt CACHE SUITE... reads the lists of the suites, and sets the array "apt": the options for apt-get and apt-cache.
debian_apt() {
  local cache=$1 keyring=/usr/share/keyrings/debian-archive-keyring.gpg main security suite mirror
  shift
  command -v apt-get >/dev/null || die "these are Debian packages and there is no apt-get to fetch them"
  [ -e "$keyring" ] || die "$keyring is missing: install debian-archive-keyring"
  main=$(debian_mirrors | grep -v security | head -1) || true
  security=$(debian_mirrors | grep security | head -1) || true
  if [ -z "$main" ] || [ -z "$security" ]; then
    die "apt's sources name no Debian mirror, or none with security updates"
  fi
  mkdir -p "$cache"/{lists,archives}/partial
  # Empty: what the machine has installed is no matter. apt puts its locks beside it.
  : >"$cache/status"
  for suite in "$@"; do
    case $suite in *-security) mirror=$security ;; *) mirror=$main ;; esac
    echo "deb [signed-by=$keyring arch=amd64] $mirror $suite main"
  done >"$cache/sources.list"
  apt=(-qq -o "Dir::Etc::sourcelist=$cache/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::Lists=$cache/lists" -o "Dir::Cache=$cache" -o "Dir::State::status=$cache/status"
    -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
    -o APT::Sandbox::User=root -o APT::Get::List-Cleanup=0)
  apt-get "${apt[@]}" update
}

# debian_mirrors prints the addresses in the machine's own sources.
debian_mirrors() {
  {
    awk '/^URIs:/ {print $2}' /etc/apt/sources.list.d/*.sources 2>/dev/null
    awk '$1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ /^https?:/) print $i}' /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null
    true
  } | sort -u
}
