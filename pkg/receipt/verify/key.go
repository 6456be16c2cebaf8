package verify

import (
	"crypto/ed25519"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

const (
	pemType    = "PUBLIC KEY"
	maxKeyFile = 4096
)

// SaveKey writes a public key as PEM (PKIX, RFC 8410), durably, in one step: a key file is there whole or not at all.
// An older file of that name is replaced.
func SaveKey(path string, pub ed25519.PublicKey) error {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil || len(pub) != ed25519.PublicKeySize {
		return fmt.Errorf("writing the key %s: %w: %d bytes", path, ErrKey, len(pub))
	}
	if err := writeDurably(path, pem.EncodeToMemory(&pem.Block{Type: pemType, Bytes: der})); err != nil {
		return fmt.Errorf("writing the key %s: %w", path, err)
	}
	return nil
}

// LoadKey reads what SaveKey wrote. It fails with ErrKey.
func LoadKey(path string) (ed25519.PublicKey, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading the key: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, fmt.Errorf("reading the key: %w", err)
	}
	pub, err := parseKey(b)
	if err != nil {
		return nil, fmt.Errorf("reading the key %s: %w; it must be a PEM file of type %q", path, err, pemType)
	}
	return pub, nil
}

func parseKey(b []byte) (ed25519.PublicKey, error) {
	block, rest := pem.Decode(b)
	if len(b) > maxKeyFile || block == nil || block.Type != pemType || len(rest) > 0 {
		return nil, ErrKey
	}
	k, err := x509.ParsePKIXPublicKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	pub, ok := k.(ed25519.PublicKey)
	if !ok {
		return nil, fmt.Errorf("%w: it is a %T", ErrKey, k)
	}
	return pub, nil
}

func writeDurably(path string, b []byte) (err error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, filepath.Base(path)+"~*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
