package cli

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"
	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/sandbox-agent/sandbox-agent/api/sandbox/v1"
	"github.com/sandbox-agent/sandbox-agent/internal/rpc"
)

func grantFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "grants", Usage: "grants as JSON in `FILE` (session grants --help shows it)"},
		&cli.StringSliceFlag{Name: "grant-file", Usage: "`NAME/PATH=FILE`: a file of grant NAME with the content of FILE; can be given again"},
		&cli.StringSliceFlag{Name: "grant-env", Usage: "`NAME/KEY=VALUE`: a variable of grant NAME, for example kube/KUBECONFIG=/run/grants/kube/config; can be given again"},
	}
}

func runSessionGrants(ctx context.Context, c *cli.Command) error {
	a, err := args(c, "SESSION")
	if err != nil {
		return err
	}
	grants, err := grantsOf(c)
	if err != nil {
		return withCode(ExitUsage, err)
	}
	if c.Bool("none") == (len(grants) > 0) {
		return usagef("session grants needs grants (--grants, --grant-file, --grant-env), or --none to take all away")
	}
	cl := newClient(c)
	res, err := cl.Sessions.UpdateGrants(ctx, &sandboxv1.UpdateGrantsRequest{SessionId: a[0], OwnerEpoch: c.Uint64("owner-epoch"), Grants: grants})
	if err != nil {
		return cl.Explain("replacing the grants of session "+a[0], err)
	}
	if c.Bool("json") {
		return printJSON(c.Root().Writer, res.GetSession())
	}
	return showSession(c.Root().Writer, res.GetSession())
}

// grantsOf puts together the grants of the file and those of the flags.
func grantsOf(c *cli.Command) ([]*sandboxv1.Grant, error) {
	list, err := grantsFile(c.String("grants"))
	if err != nil {
		return nil, err
	}
	named := func(name string) *sandboxv1.Grant {
		i := slices.IndexFunc(list, func(g *sandboxv1.Grant) bool { return g.GetName() == name })
		if i < 0 {
			i, list = len(list), append(list, &sandboxv1.Grant{Name: name})
		}
		return list[i]
	}
	for _, flag := range c.StringSlice("grant-file") {
		name, inside, file, err := grantFlag("grant-file", flag)
		if err != nil {
			return nil, err
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("--grant-file %s: %w", path.Join(name, inside), err)
		}
		g := named(name)
		g.Files = append(g.Files, &sandboxv1.GrantFile{Path: inside, Content: content})
	}
	for _, flag := range c.StringSlice("grant-env") {
		name, key, value, err := grantFlag("grant-env", flag)
		if err != nil {
			return nil, err
		}
		g := named(name)
		if g.Env == nil {
			g.Env = map[string]string{}
		}
		g.Env[key] = value
	}
	return list, nil
}

// grantFlag takes NAME/INSIDE=VALUE apart. What it says of a wrong one holds no value.
func grantFlag(flag, text string) (name, inside, value string, err error) {
	left, value, ok := strings.Cut(text, "=")
	name, inside, slash := strings.Cut(left, "/")
	if !ok || !slash || name == "" || inside == "" {
		return "", "", "", fmt.Errorf("--%s: give the grant's name, a slash, what it is called there, = and the value", flag)
	}
	return name, inside, value, nil
}

func grantsFile(file string) ([]*sandboxv1.Grant, error) {
	if file == "" {
		return nil, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the grants: %w", err)
	}
	req := &sandboxv1.UpdateGrantsRequest{}
	if err := protojson.Unmarshal(b, req); err != nil {
		return nil, fmt.Errorf("reading the grants in %s: %w: it must be JSON as session grants --help shows it", file, rpc.WithoutContent(err))
	}
	return req.GetGrants(), nil
}
