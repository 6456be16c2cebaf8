package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEveryFrameComesBackAsItWasSent(t *testing.T) {
	seals := []SealState{{"/a", 1, 2, 3, true, [32]byte{1, 31: 2}}, {Path: "/b", MountID: 4, Device: 5, Inode: 6}}
	setup := Setup{1000, 1001, true, 3, 4, 5, 6, []string{"/a", "/b"}}
	command := Command{"/bin/bash", []string{"bash", "-c", "echo"}, "/w", []string{"A=b"}, []Try{{"n", "t", "\x00a", 0, true}, {"m", "", "abcd", 80, false}}}
	report := Report{true, 1, 2, true, true, []string{"/a"}, 7, 8, 9}

	gotSetup, err := DecodeSetup(setup.Encode())
	require.NoError(t, err)
	require.Equal(t, setup, gotSetup)
	gotCommand, err := DecodeCommand(command.Encode())
	require.NoError(t, err)
	require.Equal(t, command, gotCommand)
	gotReport, err := DecodeReport(report.Encode())
	require.NoError(t, err)
	require.Equal(t, report, gotReport)
	gotReady, err := DecodeReady(Ready{1, 2, seals}.Encode())
	require.NoError(t, err)
	require.Equal(t, Ready{1, 2, seals}, gotReady)
	gotArm, err := DecodeArm(Arm{1, 2}.Encode())
	require.NoError(t, err)
	require.Equal(t, Arm{1, 2}, gotArm)
	gotFailed, err := DecodeFailed(Failed{"why"}.Encode())
	require.NoError(t, err)
	require.Equal(t, Failed{"why"}, gotFailed)

	kind, body, err := Read(bytes.NewReader(Frame(KindReport, report.Encode())))
	require.NoError(t, err)
	require.Equal(t, KindReport, kind)
	require.Equal(t, report.Encode(), body)
}

func TestASealIsTheSameInAnotherMountNamespaceAndNotWithAnythingElseChanged(t *testing.T) {
	seal := SealState{"/a", 1, 2, 3, true, [32]byte{1}}
	elsewhere := seal
	elsewhere.MountID = 9
	require.True(t, seal.Same(elsewhere))
	for name, change := range map[string]func(*SealState){
		"path": func(s *SealState) { s.Path = "/b" }, "device": func(s *SealState) { s.Device++ }, "inode": func(s *SealState) { s.Inode++ },
		"writable": func(s *SealState) { s.ReadOnly = false }, "content": func(s *SealState) { s.SHA256[31]++ },
	} {
		changed := seal
		change(&changed)
		require.False(t, seal.Same(changed), name)
	}
}

func TestAFrameThatIsCutOrTooLongIsAnError(t *testing.T) {
	whole := Report{true, 1, 2, true, true, []string{"/a"}, 7, 8, 9}.Encode()
	for n := range whole {
		_, err := DecodeReport(whole[:n])
		require.Error(t, err, "cut after %d bytes", n)
	}
	ready := Ready{1, 2, []SealState{{"/a", 1, 2, 3, true, [32]byte{1}}}}.Encode()
	for n := range ready {
		_, err := DecodeReady(ready[:n])
		require.Error(t, err, "cut after %d bytes", n)
	}
	_, err := DecodeReport(append(whole, 0))
	require.Error(t, err)
	frame := Frame(KindReport, whole)
	for n := 1; n < len(frame); n++ {
		_, _, err := Read(bytes.NewReader(frame[:n]))
		require.Error(t, err)
		require.False(t, errors.Is(err, ErrClosed), "cut after %d bytes is not an orderly end", n)
	}
	_, _, err = Read(bytes.NewReader(nil))
	require.ErrorIs(t, err, ErrClosed)
	_, _, err = Read(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0xff, 'P'}))
	require.Error(t, err)
}

func FuzzDecode(f *testing.F) {
	f.Add(Setup{Seals: []string{"/a"}}.Encode())
	f.Add(Command{Argv: []string{"a"}}.Encode())
	f.Add(Report{SealsBroken: []string{"x"}}.Encode())
	f.Add(Ready{Seals: []SealState{{Path: "p"}}}.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		// What decodes encodes to the same bytes: nothing in a frame is ignored. (A flag other than 1 reads as 0.)
		if c, err := DecodeCommand(b); err == nil {
			require.Equal(t, b, c.Encode())
		}
		_, _ = DecodeSetup(b)
		_, _ = DecodeReport(b)
		_, _ = DecodeReady(b)
		_, _, _ = Read(bytes.NewReader(b))
	})
}
