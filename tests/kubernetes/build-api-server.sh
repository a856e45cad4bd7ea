#!/usr/bin/env bash
# Build the API server of Kubernetes from Debian's source package, which needs no other source of Go
# modules, and put etcd and kubectl beside it:
#
#     build-api-server.sh FOLDER
#
# About 4 minutes on two cores and 3 GB of disk, all in FOLDER; what is there already is not built
# again. Needs Debian 12 and root, for the compiler.
set -euo pipefail

folder=$(mkdir -p "$1" && cd "$1" && pwd)
if [[ -x $folder/bin/kube-apiserver && -x $folder/bin/etcd && -x $folder/bin/kubectl ]]; then
  exit 0
fi

# A list of source packages of its own: the system's may have none.
mkdir -p "$folder/apt/lists/partial" "$folder/bin" "$folder/gopath/src/k8s.io" "$folder/debian"
system=/etc/apt/sources.list.d/debian.sources
if [[ -f $system ]]; then
  list=$folder/apt/list.sources
  sed 's/^Types:.*/Types: deb-src/' "$system" > "$list"
else
  list=$folder/apt/sources.list
  sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > "$list"
fi
source_apt=(-o "Dir::Etc::sourcelist=$list" -o "Dir::Etc::sourceparts=-"
  -o "Dir::State::lists=$folder/apt/lists" -o "APT::Sandbox::User=root")

apt-get -qq update
apt-get -qq install -y --no-install-recommends golang-1.19-go dpkg-dev
apt-get -qq "${source_apt[@]}" update
cd "$folder/debian"
apt-get -qq download etcd-server kubernetes-client golang-github-modern-go-reflect2-dev
for package in *.deb; do
  dpkg -x "$package" unpacked
done
apt-get -qq "${source_apt[@]}" source --download-only kubernetes
rm -rf src
dpkg-source -x kubernetes_*.dsc src
cp unpacked/usr/bin/etcd unpacked/usr/bin/kubectl "$folder/bin"

# The vendored reflect2 1.0.1 crashes the server when Go is 1.18 or newer.
reflect2=github.com/modern-go/reflect2
rm -r "src/vendor/$reflect2"
cp -r "unpacked/usr/share/gocode/src/$reflect2" "src/vendor/$reflect2"
ln -sfn "$folder/debian/src" "$folder/gopath/src/k8s.io/kubernetes"

export PATH=/usr/lib/go-1.19/bin:$PATH GOCACHE=$folder/gocache GOPATH=$folder/gopath
export CGO_ENABLED=0 GO111MODULE=off GOFLAGS='' GOPROXY=off
kubernetes=k8s.io/kubernetes
# Go takes the name of a package from the path by which the folder was entered.
cd "$GOPATH/src/$kubernetes"
export PWD=$GOPATH/src/$kubernetes

go build -o "$folder/bin/openapi-gen" "$kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
not_ours='/(testdata|test|sample-apiserver|sample-controller|code-generator/_examples)/|_test.go|kube-openapi/'
packages=$(
  (cd staging/src && grep -rl --include='*.go' '+k8s:openapi-gen=' k8s.io) \
    | grep -v -E "$not_ours" | xargs -n 1 dirname | sort -u | sed "s|^|$kubernetes/vendor/|"
  grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd \
    | grep -v _test.go | xargs -n 1 dirname | sort -u | sed "s|^|$kubernetes/|"
)
"$folder/bin/openapi-gen" --logtostderr -i "$(echo "$packages" | paste -s -d ,)" \
  -p "$kubernetes/pkg/generated/openapi" -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r "$folder/api-report.txt" \
  -o "$GOPATH/src"

version=$(dpkg-parsechangelog -S Version | sed 's/[-+].*//')
flags="-s -w"
for package in vendor/k8s.io/component-base/version vendor/k8s.io/client-go/pkg/version; do
  flags+=" -X $kubernetes/$package.gitVersion=v$version"
  flags+=" -X $kubernetes/$package.gitMajor=$(cut -d . -f 1 <<< "$version")"
  flags+=" -X $kubernetes/$package.gitMinor=$(cut -d . -f 2 <<< "$version")"
done
go build -ldflags "$flags" -o "$folder/bin/kube-apiserver.new" "$kubernetes/cmd/kube-apiserver"
mv "$folder/bin/kube-apiserver.new" "$folder/bin/kube-apiserver"
rm -rf "$folder/gocache" "$folder/debian" "$folder/gopath" "$folder/apt"
