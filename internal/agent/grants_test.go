package agent

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
)

func grant(name string, change ...func(*sandboxv1.Grant)) *sandboxv1.Grant {
	g := &sandboxv1.Grant{
		Name: name, Files: []*sandboxv1.GrantFile{{Path: "config", Content: []byte("content of " + name)}},
		Env: map[string]string{strings.ToUpper(strings.ReplaceAll(name, "-", "_")): "/run/grants/" + name + "/config"},
	}
	for _, f := range change {
		f(g)
	}
	return g
}

func file(path string) func(*sandboxv1.Grant) {
	return func(g *sandboxv1.Grant) { g.Files = append(g.Files, &sandboxv1.GrantFile{Path: path}) }
}

func variable(k, v string) func(*sandboxv1.Grant) {
	return func(g *sandboxv1.Grant) { g.Env[k] = v }
}

func TestGrantsThatMustNotBeAreNamedAndNeverShown(t *testing.T) {
	var many []*sandboxv1.Grant
	for i := range maxGrants + 1 {
		many = append(many, &sandboxv1.Grant{Name: fmt.Sprintf("g%d", i)})
	}
	manyFiles := grant("a")
	for i := range maxGrantFiles {
		manyFiles.Files = append(manyFiles.Files, &sandboxv1.GrantFile{Path: fmt.Sprint(i)})
	}
	big := func(n int) *sandboxv1.Grant {
		return grant("big", func(g *sandboxv1.Grant) { g.Files[0].Content = make([]byte, n) })
	}
	bad := map[string]struct {
		list  []*sandboxv1.Grant
		names string
	}{
		"too many":                 {many, "33 of them, at most 32"},
		"no name":                  {[]*sandboxv1.Grant{{}}, `name ""`},
		"a name in capitals":       {[]*sandboxv1.Grant{grant("A")}, `name "A"`},
		"a name that is a path":    {[]*sandboxv1.Grant{grant("a/b")}, `name "a/b"`},
		"dots":                     {[]*sandboxv1.Grant{grant("..")}, `name ".."`},
		"a long name":              {[]*sandboxv1.Grant{grant(strings.Repeat("a", 64))}, "1 to 63"},
		"a name twice":             {[]*sandboxv1.Grant{grant("a"), {Name: "b"}, {Name: "a"}}, `"a" stands there twice`},
		"too many files":           {[]*sandboxv1.Grant{manyFiles}, "65 files, at most 64"},
		"an absolute path":         {[]*sandboxv1.Grant{grant("a", file("/etc/passwd"))}, `path "/etc/passwd"`},
		"a way out":                {[]*sandboxv1.Grant{grant("a", file("x/../../y"))}, `path "x/../../y"`},
		"a path that is not clean": {[]*sandboxv1.Grant{grant("a", file("x//y"))}, `path "x//y"`},
		"a folder":                 {[]*sandboxv1.Grant{grant("a", file("x/"))}, `path "x/"`},
		"no path":                  {[]*sandboxv1.Grant{grant("a", file(""))}, `path ""`},
		"a dot":                    {[]*sandboxv1.Grant{grant("a", file("."))}, `path "."`},
		"a NUL":                    {[]*sandboxv1.Grant{grant("a", file("x\x00"))}, "control characters"},
		"a long name of a file":    {[]*sandboxv1.Grant{grant("a", file(strings.Repeat("x", 256)))}, "255 bytes"},
		"a long path":              {[]*sandboxv1.Grant{grant("a", file(strings.Repeat("x/", 600)+"y"))}, "1024 bytes"},
		"a path twice":             {[]*sandboxv1.Grant{grant("a", file("config"))}, `path "config" stands twice`},
		"a file as a folder":       {[]*sandboxv1.Grant{grant("a", file("config/x"))}, `"config" in "a" is a file and a folder`},
		"too much":                 {[]*sandboxv1.Grant{big(maxGrantBytes)}, "at most 1048576"},
		"an env twice":             {[]*sandboxv1.Grant{grant("a", variable("X", "1")), grant("b", variable("X", "1"))}, `env "X" of "b"`},
		"no variable":              {[]*sandboxv1.Grant{grant("a", variable("A B", "canary"))}, `env "A B"`},
		"a NUL in a variable":      {[]*sandboxv1.Grant{grant("a", variable("X", "canary\x00"))}, `env "X"`},
		"no time":                  {[]*sandboxv1.Grant{grant("a", func(g *sandboxv1.Grant) { g.ExpiresAt = &timestamppb.Timestamp{Nanos: -1} })}, "expires_at"},
	}
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "GIT_DIR", "GIT_CONFIG_COUNT", "LD_PRELOAD", "BASH_ENV", "ENV", "BASH_FUNC_x"} {
		bad["env "+name] = struct {
			list  []*sandboxv1.Grant
			names string
		}{[]*sandboxv1.Grant{grant("a", variable(name, "canary"))}, fmt.Sprintf("env %q", name)}
	}
	for what, c := range bad {
		_, err := newGrantSet(c.list, nil)
		require.ErrorIs(t, err, ErrInvalid, what)
		require.ErrorContains(t, err, c.names, what)
		require.NotContains(t, err.Error(), "canary", what)
		require.NotContains(t, err.Error(), "content of", what)
	}
	for what, list := range map[string][]*sandboxv1.Grant{
		"none": nil, "a kubeconfig": {grant("kube", variable("KUBECONFIG", "/run/grants/kube/config"))}, "an empty one": {{Name: "-"}},
		"folders": {grant("a", file("x/y/z"), file("x/y/w"), file("x/yz"))}, "as many as may be": many[:maxGrants], "as much as may be": {big(maxGrantBytes - 64)},
	} {
		_, err := newGrantSet(list, nil)
		require.NoError(t, err, what)
	}
	_, err := newGrantSet([]*sandboxv1.Grant{grant("a", variable("GIT_SSH_COMMAND", "x"))}, []string{"GIT_SSH_COMMAND"})
	require.NoError(t, err, "what the operator allows")
}

func TestTheDigestIsOfTheWholeSetAndOfNothingElse(t *testing.T) {
	digest := func(list ...*sandboxv1.Grant) string {
		set, err := newGrantSet(list, nil)
		require.NoError(t, err)
		return set.digest
	}
	require.Empty(t, digest())
	base := digest(grant("a", file("x")), grant("b"))
	require.Regexp(t, "^[0-9a-f]{64}$", base)
	swapped := grant("a", file("x"))
	slices.Reverse(swapped.Files)
	require.Equal(t, base, digest(grant("b"), swapped), "the order in which it was written")
	at := func(s int64) func(*sandboxv1.Grant) {
		return func(g *sandboxv1.Grant) { g.ExpiresAt = &timestamppb.Timestamp{Seconds: s} }
	}
	seen := map[string]string{base: "the set itself"}
	for what, list := range map[string][]*sandboxv1.Grant{
		"one less":      {grant("a", file("x"))},
		"a name":        {grant("a", file("x")), grant("c")},
		"a path":        {grant("a", file("y")), grant("b")},
		"a content":     {grant("a", file("x"), func(g *sandboxv1.Grant) { g.Files[0].Content[0]++ }), grant("b")},
		"a variable":    {grant("a", file("x"), variable("X", "")), grant("b")},
		"a value":       {grant("a", file("x"), variable("X", "1")), grant("b")},
		"an expiry":     {grant("a", file("x"), at(1)), grant("b")},
		"a later one":   {grant("a", file("x"), at(2)), grant("b")},
		"of the other":  {grant("a", file("x")), grant("b", at(1))},
		"moved bytes":   {grant("a", file("xc")), grant("b")},
		"a moved file":  {grant("a"), grant("b", file("x"))},
		"a moved value": {grant("a", file("x")), grant("b", variable("X", "1"))},
	} {
		d := digest(list...)
		require.Empty(t, seen[d], what)
		seen[d] = what
	}
}

func TestP15TheRecordOfASessionHasNoContent(t *testing.T) {
	set, err := newGrantSet([]*sandboxv1.Grant{grant("a", variable("X", "canary-value"), func(g *sandboxv1.Grant) {
		g.Files = []*sandboxv1.GrantFile{{Path: "canary-path", Content: []byte("canary-content")}}
	})}, nil)
	require.NoError(t, err)
	s := newSession(&Agent{log: slog.New(slog.DiscardHandler), clock: nodeClock()}, sessionRecord{ID: "s"})
	set.take(s, &s.rec)
	b, err := json.Marshal(&s.rec)
	require.NoError(t, err)
	require.NotContains(t, string(b), "canary")
	require.Contains(t, string(b), set.digest)
	require.Equal(t, []string{"a"}, s.rec.proto().GetGrantNames())
	require.Equal(t, map[string]string{"A": "/run/grants/a/config", "X": "canary-value"}, maps.Collect(maps.All(s.variables())))
}

func TestTheFirstGrantThatExpiresCounts(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	list := []grantRecord{{Name: "never"}, {Name: "late", ExpiresAt: at.Add(time.Hour)}, {Name: "soon", ExpiresAt: at}}
	require.Equal(t, at, firstExpiry(list))
	_, over := expired(list, at.Add(-1))
	require.False(t, over)
	g, over := expired(list, at)
	require.True(t, over)
	require.Equal(t, "soon", g.Name)
	require.Zero(t, firstExpiry(list[:1]))
}
