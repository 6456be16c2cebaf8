package gitguard

import "context"

// Report is what a check of a repository found.
type Report struct {
	Repository string    `json:"repository"`
	CommonDir  string    `json:"commonDir"`
	Findings   []Finding `json:"findings"`
}

// Runner runs Git in the repository and gives its standard output.
type Runner func(ctx context.Context, args ...string) (string, error)

func CheckRepository(ctx context.Context, path string, run Runner) (Report, error) {
	return Report{}, ErrNoRepository
}
