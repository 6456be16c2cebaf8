package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var digest = "@sha256:" + strings.Repeat("0a", 32)

func TestAFileChangesOneKeyOfContainerdsRuntimesAndKeepsTheOthers(t *testing.T) {
	c := Default(16 * gib)
	require.NoError(t, Parse([]byte(`
runtime: {default: runc, allowed: [embedded, runc, gvisor, kata]}
containerd: {snapshotter: native, images_from: k8s.io, runtimes: {kata: {handler: io.containerd.kata-qemu.v2, config: /etc/kata.toml}, runc: {binary: /opt/runc}}}
`), &c))
	require.NoError(t, c.Validate())
	require.Equal(t, Containerd{
		Address: "/run/containerd/containerd.sock", Namespace: "sandbox-agent", Snapshotter: "native", ImagesFrom: "k8s.io",
		Runtimes: ContainerdRuntimes{
			Runc:   ContainerdRuntime{Handler: "io.containerd.runc.v2", Binary: "/opt/runc"},
			Gvisor: ContainerdRuntime{Handler: "io.containerd.runsc.v1"},
			Kata:   ContainerdKata{Handler: "io.containerd.kata-qemu.v2", Config: "/etc/kata.toml"},
		},
	}, c.Containerd)
	for name, handler := range map[string]string{"runc": "io.containerd.runc.v2", "gvisor": "io.containerd.runsc.v1", "kata": "io.containerd.kata-qemu.v2"} {
		r, ok := c.Containerd.Runtimes.Named(name)
		require.True(t, ok)
		require.Equal(t, handler, r.Handler)
	}
	_, ok := c.Containerd.Runtimes.Named("embedded")
	require.False(t, ok)
}

func TestAHandlerIsOfTheFamilyThatItsRuntimePromises(t *testing.T) {
	for text, key := range map[string]string{
		"runtimes: {kata: {handler: io.containerd.runc.v2}}":    "containerd.runtimes.kata.handler",
		"runtimes: {gvisor: {handler: io.containerd.runc.v2}}":  "containerd.runtimes.gvisor.handler",
		"runtimes: {runc: {handler: io.containerd.kata.v2}}":    "containerd.runtimes.runc.handler",
		"runtimes: {runc: {handler: ''}}":                       "containerd.runtimes.runc.handler",
		"runtimes: {runc: {handler: io.containerd.runc./x.v2}}": "containerd.runtimes.runc.handler",
		"runtimes: {kata: {binary: /opt/kata}}":                 "containerd.runtimes.kata.binary is no key",
		"runtimes: {kata: {config: kata.toml}}":                 "containerd.runtimes.kata.config",
		"runtimes: {runc: {binary: /}}":                         "containerd.runtimes.runc.binary",
		"runtimes: {crun: {handler: io.containerd.runc.v2}}":    "containerd.runtimes.crun is no key",
		"namespace: ../x":            "containerd.namespace",
		"namespace: ''":              "containerd.namespace",
		"snapshotter: over/lay":      "containerd.snapshotter",
		"images_from: ../x":          "containerd.images_from",
		"images_from: sandbox-agent": "containerd.images_from",
	} {
		c := Default(16 * gib)
		err := Parse([]byte("containerd: {"+text+"}"), &c)
		if err == nil {
			err = c.Validate()
		}
		require.ErrorIs(t, err, ErrInvalid, text)
		require.ErrorContains(t, err, key, text)
	}
}

func TestAnImageIsNamedByItsDigest(t *testing.T) {
	validate := func(rootfs string, tags bool) error {
		c := Default(16 * gib)
		c.Rootfs, c.RootfsAllowTags = rootfs, tags
		return c.Validate()
	}
	for _, good := range []string{
		"docker.io/library/debian" + digest, "docker.io/library/debian:13" + digest, "registry.example.com:5000/a/b-c_d" + digest, "localhost/sandbox" + digest,
		"host", "/srv/rootfs",
	} {
		require.NoError(t, validate(good, false), good)
	}
	for _, tagged := range []string{"docker.io/library/debian:13", "localhost:5000/sandbox:latest"} {
		require.ErrorContains(t, validate(tagged, false), "rootfs_allow_tags: true", tagged)
		require.NoError(t, validate(tagged, true), tagged)
	}
	for _, bad := range []string{
		"", "image", "debian" + digest, "library/debian" + digest, "docker.io/library/debian", "docker.io/library/debian@sha256:12", "docker.io/library/debian@sha512:" + strings.Repeat("0a", 64),
		"docker.io/Library/debian" + digest, "docker.io/../debian" + digest, "docker.io/a b" + digest, "docker.io/a\n" + digest, "docker.io/" + strings.Repeat("a", 1024) + digest,
		"rel/ative", "/srv/../x", "/srv/x/", "HOST",
	} {
		for _, tags := range []bool{false, true} {
			err := validate(bad, tags)
			require.ErrorIs(t, err, ErrInvalid, bad)
			require.ErrorContains(t, err, "rootfs", bad)
		}
	}
}
